"""Timing what runs, into Records."""
