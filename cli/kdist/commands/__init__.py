"""The commands: one file each, named as typed, offering `command`."""
