"""The sender daemon: reads documents, makes artifacts with a method, ships them. One file a method in text/ and kv/."""
