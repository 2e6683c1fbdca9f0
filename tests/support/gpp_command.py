"""The command `gpp` as a script, for the process that has imported everything."""

from gpp.app.command import main

main()
