"""Reports: the output of a command as data, with a writer for JSON."""
