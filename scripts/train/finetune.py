"""Fine-tune a model on chats, prompts or texts: `titans_hf.train.finetune`."""

from titans_hf.train.finetune import main

if __name__ == "__main__":
    main()
