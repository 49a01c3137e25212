"""Other interfaces than OpenAI's chats and completions. Each is a translation to a chat and back."""
