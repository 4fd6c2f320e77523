"""The Gradio chat page: a plain gRPC client of the frontend."""
