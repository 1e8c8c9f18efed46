"""An engine in a child process: its start, its socket, its end. It knows no engine, only its kind."""
