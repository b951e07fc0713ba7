"""Programs that measure: each prints a table, writes JSON, and runs the peer beside us."""
