from vitrail.cli import main

main()
