"""What both ends of the wire share: manifest, verdicts, container, store, ledger, errors, settings. No MLX here."""
