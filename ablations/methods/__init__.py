"""Every method against the dense cache, in one process: how faithful, how large, how long."""
