"""The audit of a root: everything that is stored is read and checked, and nothing is written."""
