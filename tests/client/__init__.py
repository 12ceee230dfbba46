"""Tests of the client library and the command line (`tarry`)."""
