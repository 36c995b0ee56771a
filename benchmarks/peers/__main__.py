"""`python -m benchmarks.peers`; see `command`."""

if __name__ == "__main__":
    from benchmarks.peers.command import main

    main()
