"""The commands, a file each. Heavy imports wait until a command runs, so that help is instant."""
