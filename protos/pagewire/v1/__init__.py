"""Generated protocol buffers and gRPC stubs of the public and the engine API."""
