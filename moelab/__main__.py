"""`python -m moelab` is the command `moelab`."""

from __future__ import annotations

from moelab.cli import main

if __name__ == "__main__":
    main()
