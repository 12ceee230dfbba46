"""What other systems publish as tests: which test of this repository says the same, and those that nobody had yet."""
