#!lua name=headrace

-- Every move of a request through Redis, each one atomic. The keyspace is described in keys.py.
--
-- live hash:  request    packed GenerationRequest (dropped at the end, it may be large)
--             header     packed QueueEntry, what the dispatcher needs to place it
--             queue      the queue stream it belongs to      entry   its id there, while queued
--             attempt    raised by every assignment and by every seizure: the fence
--             failures   replicas that died with it
--             replica    who has it, '' while queued         followers   feed owners, by space
--             serial     deltas published so far             ended   '1' after its last delta
--             cancelled  once somebody cancelled it: the code with which it is to end

local function words(text)
  local list = {}
  for word in string.gmatch(text or '', '%S+') do list[#list + 1] = word end
  return list
end

local function append(live_key, log_key, frames, life_ms)
  if redis.call('APPEND', log_key, frames) == #frames then
    local left = redis.call('PTTL', live_key)
    redis.call('PEXPIRE', log_key, left > 0 and left or life_ms)
  end
end

local function finish(open_key, live_key, log_key, id, life_ms)
  redis.call('HSET', live_key, 'ended', '1')
  redis.call('HDEL', live_key, 'request', 'header')
  redis.call('PEXPIRE', live_key, life_ms)
  redis.call('PEXPIRE', log_key, life_ms)
  redis.call('SREM', open_key, id)
end

-- Accept a request: both the live key and the place in the queue, or neither.
-- Without a replica that has lately served these weights it would only wait for its deadline.
-- keys: live, log, queue, open, serving
-- args: request id, header, request, follower, most queued, time to live in ms
local function enqueue(keys, args)
  if redis.call('EXISTS', keys[1]) == 1 then return 'exists' end
  if redis.call('EXISTS', keys[5]) == 0 then return 'unserved' end
  if redis.call('XLEN', keys[3]) >= tonumber(args[5]) then return 'full' end
  local entry = redis.call('XADD', keys[3], '*', 'id', args[1], 'header', args[2])
  redis.call('HSET', keys[1], 'request', args[3], 'header', args[2], 'queue', keys[3],
    'entry', entry, 'attempt', 0, 'failures', 0, 'serial', 0, 'replica', '',
    'followers', args[4])
  redis.call('PEXPIRE', keys[1], args[6])
  redis.call('DEL', keys[2])
  redis.call('SADD', keys[4], args[1])
  return 'queued'
end

-- Give a queued request to a replica: raise the attempt, fill the inbox, leave the queue.
-- keys: leader, live, inbox
-- args: fencing token, request id, replica id, weights digest, most in an inbox
local function assign(keys, args)
  if redis.call('GET', keys[1]) ~= args[1] then return {'not_leader'} end
  local live = redis.call('HMGET', keys[2],
    'attempt', 'replica', 'ended', 'cancelled', 'queue', 'entry', 'request')
  if not live[1] then return {'gone'} end
  if live[3] or live[4] then return {'ended'} end
  if live[2] ~= '' then return {'taken'} end
  if redis.call('XLEN', keys[3]) >= tonumber(args[5]) then return {'full'} end
  local attempt = tonumber(live[1]) + 1
  redis.call('HSET', keys[2], 'attempt', attempt, 'replica', args[3], 'entry', '')
  redis.call('XDEL', live[5], live[6])
  local order = redis.call('XADD', keys[3], '*', 'v', '1', 'kind', 'assignment', 'id', args[2],
    'attempt', attempt, 'weights', args[4], 'request', live[7])
  return {'assigned', attempt, order}
end

-- Put an assigned request back into its queue. A crash counts as a failure, a hand-back does
-- not. With a token only the leader may do it; without one, the replica that has it.
-- keys: leader, live              args: fencing token or '', request id, replica id, failures to add
local function requeue(keys, args)
  if args[1] ~= '' and redis.call('GET', keys[1]) ~= args[1] then return 'not_leader' end
  local live = redis.call('HMGET', keys[2], 'replica', 'ended', 'queue', 'header', 'cancelled')
  if not live[1] then return 'gone' end
  if live[2] then return 'ended' end
  if live[1] ~= args[3] then return 'moved' end
  if live[5] then return 'cancelled' end
  local entry = redis.call('XADD', live[3], '*', 'id', args[2], 'header', live[4])
  redis.call('HINCRBY', keys[2], 'attempt', 1)
  redis.call('HINCRBY', keys[2], 'failures', args[4])
  redis.call('HSET', keys[2], 'replica', '', 'entry', entry)
  return 'queued'
end

-- Publish one engine step: per request append to its log if the attempt still holds, then one
-- feed entry per follower. A last delta ends the request. Saying the same deltas twice (a reply
-- was lost) publishes them once. Deltas that follow some that this server lost (it failed over)
-- are refused as those of a lost request are; only the ending may follow a gap.
-- keys: open, then live and log of each request
-- args: prefix of feed keys, most entries in a feed, ms a log outlives the end,
--       then of each request: id, attempt, serial of its first delta, number of deltas,
--       framed deltas, '1' if they end it
local function step(keys, args)
  local results, feeds = {}, {}
  for i = 1, (#keys - 1) / 2 do
    local live_key, log_key = keys[2 * i], keys[2 * i + 1]
    local id, attempt, serial, count, frames, is_last = unpack(args, 6 * i - 2, 6 * i + 3)
    local live = redis.call('HMGET', live_key,
      'attempt', 'ended', 'followers', 'cancelled', 'serial')
    if not live[1] then
      results[i] = 'gone'
    elseif live[2] then
      results[i] = 'ended'
    elseif live[1] ~= attempt then
      results[i] = 'moved'
    elseif tonumber(serial) < tonumber(live[5]) then
      results[i] = live[4] and 'cancelled' or 'ok'
    elseif serial ~= live[5] and is_last ~= '1' then
      results[i] = 'gone'
    else
      append(live_key, log_key, frames, args[3])
      redis.call('HSET', live_key, 'serial', serial + count)
      for _, follower in ipairs(words(live[3])) do
        local feed = feeds[follower] or {}
        feed[#feed + 1] = frames
        feeds[follower] = feed
      end
      if is_last == '1' then
        finish(keys[1], live_key, log_key, id, args[3])
      end
      results[i] = live[4] and 'cancelled' or 'ok'
    end
  end
  for follower, feed in pairs(feeds) do
    local key = args[1] .. follower
    redis.call('XADD', key, 'MAXLEN', '~', args[2], '*', 'd', table.concat(feed))
    redis.call('PEXPIRE', key, args[3])
  end
  return results
end

-- Cancel a request. Of an assigned one its replica is told; of a queued one the dispatcher is,
-- through the queue itself: either ends it.
-- keys: live                      args: request id, prefix of inbox keys, error code
local function cancel(keys, args)
  local live = redis.call('HMGET', keys[1], 'replica', 'ended', 'queue', 'entry', 'cancelled')
  if not live[1] then return 'gone' end
  if live[2] then return 'ended' end
  if live[5] then return 'cancelled' end
  redis.call('HSET', keys[1], 'cancelled', args[3])
  if live[1] == '' then
    redis.call('XDEL', live[3], live[4])
    local entry = redis.call('XADD', live[3], '*', 'id', args[1], 'cancelled', args[3])
    redis.call('HSET', keys[1], 'entry', entry)
    return 'queued'
  end
  redis.call('XADD', args[2] .. live[1], '*', 'v', '1', 'kind', 'cancel', 'id', args[1],
    'error', args[3])
  return 'assigned'
end

-- Take a request from whoever has it, so that the caller alone may end it. The code with which
-- it is to end stays with it, in case this caller dies too.
-- keys: live                      args: error code
local function seize(keys, args)
  local live = redis.call('HMGET', keys[1], 'attempt', 'ended', 'queue', 'entry', 'request')
  if not live[1] then return {'gone'} end
  if live[2] then return {'ended'} end
  if live[4] ~= '' then redis.call('XDEL', live[3], live[4]) end
  redis.call('HSET', keys[1], 'replica', '', 'entry', '', 'cancelled', args[1])
  return {'seized', redis.call('HINCRBY', keys[1], 'attempt', 1), live[5]}
end

-- Send a request's deltas to one more follower, from the log's present end on.
-- keys: live, log                 args: follower
local function follow(keys, args)
  local live = redis.call('HMGET', keys[1], 'attempt', 'followers', 'ended')
  if not live[1] then return {'gone'} end
  for _, follower in ipairs(words(live[2])) do
    if follower == args[1] then return {'following', redis.call('STRLEN', keys[2])} end
  end
  redis.call('HSET', keys[1], 'followers', live[2] .. ' ' .. args[1])
  return {'following', redis.call('STRLEN', keys[2])}
end

-- Keep, or take, the lead of a model's dispatching.
-- keys: leader                    args: own fencing token, lease in ms
local function lead(keys, args)
  local leader = redis.call('GET', keys[1])
  if leader and leader ~= args[1] then return 'standby' end
  redis.call('SET', keys[1], args[1], 'PX', args[2])
  return 'leading'
end

redis.register_function('headrace_enqueue', enqueue)
redis.register_function('headrace_assign', assign)
redis.register_function('headrace_requeue', requeue)
redis.register_function('headrace_step', step)
redis.register_function('headrace_cancel', cancel)
redis.register_function('headrace_seize', seize)
redis.register_function('headrace_follow', follow)
redis.register_function('headrace_lead', lead)
