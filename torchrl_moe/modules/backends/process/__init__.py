"""An engine in a child process: how it is started, reached and ended. Nothing here knows more of an engine than its
kind."""
