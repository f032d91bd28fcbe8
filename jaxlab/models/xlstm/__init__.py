"""xLSTM language models: memory of a fixed size instead of attention."""
