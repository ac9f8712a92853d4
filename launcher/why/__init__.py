"""The cause of a failure, from the files of a run: `ngsgd why`."""
