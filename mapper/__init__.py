"""Linear maps from one model's KV cache to that of another of its family: fit, apply, evaluate and store."""
