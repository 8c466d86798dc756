"""DNA: a tokenizer of single letters, labelled sequences from files, and scores."""

from .tokenizer import dna_tokenizer

__all__ = ["dna_tokenizer"]
