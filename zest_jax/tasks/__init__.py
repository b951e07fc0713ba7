"""Where questions come from: graphs, chains, passages, question sets and scripted episodes."""
