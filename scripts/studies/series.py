"""Long-term forecasting beside DLinear and PatchTST: `titans_hf.studies.series`."""

from titans_hf.studies.series import main

if __name__ == "__main__":
    main()
