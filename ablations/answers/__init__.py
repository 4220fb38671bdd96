"""Questions asked of every method's message, through real daemons."""
