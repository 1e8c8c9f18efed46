"""An engine in a child process: how it is started, reached and ended. Of an engine, only its kind is known here."""
