"""How fast: the wire, the first token, selection and look-ups, each beside its floor in the same run."""
