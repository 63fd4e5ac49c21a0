"""The command: configuration, order of work, progress, reports and exit codes.

The only room that may import all others, print, read environment variables or exit.
"""
