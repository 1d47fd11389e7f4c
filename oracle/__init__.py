"""Compares the losses of nemorl with those that TRL, verl and OpenRLHF install: `make oracle`."""
