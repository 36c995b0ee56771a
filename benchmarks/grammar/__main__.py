"""`python -m benchmarks.grammar`; see `command`, which the engines' processes need not import."""

if __name__ == "__main__":
    from benchmarks.grammar.command import main

    main()
