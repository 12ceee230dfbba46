"""A root that a daemon of an earlier commit has written: what is stored now must serve it as it was promised then."""
