"""What every experiment is run with: cells one after the other, a record of each, and what it was measured with."""
