"""Methods whose message is text."""
