"""The command line: one file per command. Nothing here imports torch or rich before a command needs it."""
