"""The receiver daemon: judges artifacts, takes them in, rebuilds caches, answers questions, keeps the ledger."""
