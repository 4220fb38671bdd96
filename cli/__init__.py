"""The kvferry command, one file a command."""
