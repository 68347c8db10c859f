"""The commands, one module each; `offbeat.cli` parses and calls them. All may be called from Python."""
