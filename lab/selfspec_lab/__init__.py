"""What measures selfspec: benchmarks, the papers' claims, the demo, and the bundled checkpoints."""
