"""``python -m kvferry.cli``: the kvferry command without its script."""

from kvferry.cli.main import main

if __name__ == "__main__":
    main()
