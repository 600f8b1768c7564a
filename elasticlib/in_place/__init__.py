"""Workers that outlive their group: what is lost is one attempt of one step."""
