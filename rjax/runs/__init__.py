"""Runs from the command line: options in, a folder with manifest and metrics out."""
