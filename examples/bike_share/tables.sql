-- Tables of the application. Shards create those in SQLite by themselves. Create those in a remote
-- database by hand.
CREATE TABLE IF NOT EXISTS rides (
    bike BIGINT NOT NULL,
    start_time TEXT NOT NULL,
    end_time TEXT NOT NULL,
    start_station TEXT NOT NULL,
    end_station TEXT NOT NULL,
    PRIMARY KEY (bike, start_time)
);
CREATE TABLE IF NOT EXISTS cycles (
    bike BIGINT NOT NULL,
    end_time TEXT NOT NULL,
    steps TEXT NOT NULL,
    PRIMARY KEY (bike, end_time)
);
