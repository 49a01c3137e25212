"""What several test files share: tiny models, checkpoints, scripted methods, counters. No file here is a test."""
