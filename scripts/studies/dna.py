"""DNA classification, the paper's Table 4: `titans_hf.studies.dna`."""

from titans_hf.studies.dna import main

if __name__ == "__main__":
    main()
