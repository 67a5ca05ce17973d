"""The command line: parse, call, print. Nothing here knows how to compile, and nothing below prints."""

from pwcc.cli.app import main

__all__ = ["main"]
