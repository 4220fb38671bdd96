"""Methods that answer from a KV cache."""
