"""The target model as 2L sublayers."""
