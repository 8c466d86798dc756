"""Records: their schemas, their provenance, and how they are written; and the sizes of models."""
