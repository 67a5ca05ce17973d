"""Sealing: what Inductor made for a piece becomes a lean program, machine code and a record."""
