"""From records to tables: judging what was recorded and laying it out. Nothing here shapes a record."""
