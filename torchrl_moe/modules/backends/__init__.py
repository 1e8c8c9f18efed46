"""One folder per engine that replicas run on. A backend knows its engine, not who asks it or how many it is one of."""
