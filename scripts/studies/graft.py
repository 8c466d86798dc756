"""What a graft's memory is worth, by place: `titans_hf.studies.graft`."""

from titans_hf.studies.graft import main

if __name__ == "__main__":
    main()
